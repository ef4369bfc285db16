from importlib.metadata import version

import litellm
from smoke import API_KEY, BASE_URL, CAPITAL, CITY, MODEL, WEATHER, City, GetWeather, tell

where = {"api_base": BASE_URL, "api_key": API_KEY, "num_retries": 0, "max_retries": 0, "timeout": 60}
ask = {"model": f"openai/{MODEL}", "temperature": 0, "max_tokens": 120, **where}
tool = {
    "type": "function",
    "function": {"name": "GetWeather", "parameters": GetWeather.model_json_schema()},
}

whole = litellm.completion(messages=CAPITAL, **ask)
chunks = list(litellm.completion(messages=CAPITAL, stream=True, stream_options={"include_usage": True}, **ask))
legacy = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="The capital of Japan is", max_tokens=8, temperature=0, **where
)
parsed = litellm.completion(messages=CITY, response_format=City, **ask)
called = litellm.completion(messages=WEATHER, tools=[tool], tool_choice="required", parallel_tool_calls=False, **ask)
try:
    litellm.completion(messages=CAPITAL, **(ask | {"model": "openai/nobody"}))
    refused = None
except litellm.NotFoundError:
    refused = "model_not_found"

(last,) = [chunk for chunk in chunks if getattr(chunk, "usage", None)]
(call, *_) = called.choices[0].message.tool_calls
answers = (whole, last, legacy, parsed, called)
tell(
    [(answer.usage.prompt_tokens, answer.usage.completion_tokens) for answer in answers],
    version=version("litellm"),
    text=whole.choices[0].message.content,
    streamed="".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    legacy=legacy.choices[0].text,
    city=City.model_validate_json(parsed.choices[0].message.content).model_dump(),
    arguments=GetWeather.model_validate_json(call.function.arguments).model_dump(),
    refused=refused,
)
