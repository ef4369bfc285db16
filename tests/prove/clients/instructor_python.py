from importlib.metadata import version

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict
from smoke import API_KEY, BASE_URL, CITY, MODEL, City, tell


class Facts(BaseModel):
    """Any object: json_object promises no more; a small model does not keep to fields that only its prompt names."""

    model_config = ConfigDict(extra="allow")


usages, cities = [], {}
for mode, wanted in (
    (instructor.Mode.TOOLS, City),
    (instructor.Mode.JSON_SCHEMA, City),
    (instructor.Mode.JSON, Facts),
):
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=60), mode=mode)
    city, answer = client.chat.completions.create_with_completion(
        model=MODEL, messages=CITY, response_model=wanted, temperature=0, max_tokens=128, max_retries=0
    )
    usages.append((answer.usage.prompt_tokens, answer.usage.completion_tokens))
    cities[mode.name] = city.model_dump()
tell(usages, version=version("instructor"), cities=cities)
