from importlib.metadata import version

import openai
from langchain_openai import ChatOpenAI
from smoke import API_KEY, BASE_URL, CAPITAL, CITY, MODEL, WEATHER, City, GetWeather, tell


def model(name: str = MODEL) -> ChatOpenAI:
    return ChatOpenAI(
        model=name,
        base_url=BASE_URL,
        api_key=API_KEY,
        max_retries=0,
        timeout=60,
        temperature=0,
        max_tokens=120,
        stream_usage=True,
    )


def structured(method: str) -> dict:
    return model().with_structured_output(City, method=method, include_raw=True).invoke(CITY)


whole = model().invoke(CAPITAL)
streamed = None
for chunk in model().stream(CAPITAL):
    streamed = chunk if streamed is None else streamed + chunk
by_schema, by_call = structured("json_schema"), structured("function_calling")
called = model().bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False).invoke(WEATHER)
try:
    model("nobody").invoke(CAPITAL)
    refused = None
except openai.NotFoundError as error:
    refused = error.code

(call, *_) = called.tool_calls
answers = (whole, streamed, by_schema["raw"], by_call["raw"], called)
tell(
    [(answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) for answer in answers],
    version=version("langchain-openai"),
    openai_version=version("openai"),
    text=whole.content,
    streamed=streamed.content,
    city=by_schema["parsed"].model_dump(),
    city_by_call=by_call["parsed"].model_dump(),
    arguments=GetWeather(**call["args"]).model_dump(),
    refused=refused,
)
