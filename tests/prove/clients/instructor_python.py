from importlib.metadata import version

import instructor
from openai import OpenAI
from smoke import API_KEY, BASE_URL, CITY, MODEL, City, tell

usages, cities = [], {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=60), mode=mode)
    city, answer = client.chat.completions.create_with_completion(
        model=MODEL, messages=CITY, response_model=City, temperature=0, max_tokens=128, max_retries=0
    )
    usages.append((answer.usage.prompt_tokens, answer.usage.completion_tokens))
    cities[mode.name] = city.model_dump()
tell(usages, version=version("instructor"), cities=cities)
