import openai
from smoke import API_KEY, BASE_URL, CAPITAL, CITY, MODEL, WEATHER, City, GetWeather, tell

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=60)
ask = {"model": MODEL, "temperature": 0, "max_tokens": 120}

whole = client.chat.completions.create(messages=CAPITAL, **ask)
chunks = list(
    client.chat.completions.create(messages=CAPITAL, stream=True, stream_options={"include_usage": True}, **ask)
)
scored = client.completions.create(model=MODEL, prompt=[[1, 2], [3]], echo=True, logprobs=1, max_tokens=1)
parsed = client.chat.completions.parse(messages=CITY, response_format=City, **ask)
called = client.chat.completions.parse(
    messages=WEATHER,
    tools=[openai.pydantic_function_tool(GetWeather)],
    tool_choice="required",
    parallel_tool_calls=False,
    **ask,
)
try:
    client.chat.completions.create(messages=CAPITAL, **(ask | {"model": "nobody"}))
    refused = None
except openai.NotFoundError as error:
    refused = error.code

(call, *_) = called.choices[0].message.tool_calls
answers = (whole, chunks[-1], scored, parsed, called)
tell(
    [(answer.usage.prompt_tokens, answer.usage.completion_tokens) for answer in answers],
    version=openai.__version__,
    models=[model.id for model in client.models.list()],
    text=whole.choices[0].message.content,
    streamed="".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    scores=[choice.logprobs.token_logprobs for choice in scored.choices],
    city=parsed.choices[0].message.parsed.model_dump(),
    arguments=call.function.parsed_arguments.model_dump(),
    refused=refused,
)
