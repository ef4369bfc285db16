import OpenAI from 'openai';
import { VERSION } from 'openai/version';

const { GW_BASE_URL: baseURL, GW_API_KEY: apiKey, GW_MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const ask = { model, temperature: 0, max_tokens: 120 };
const user = (content) => [{ role: 'user', content }];
const object = (properties) => ({
  type: 'object', properties, required: Object.keys(properties), additionalProperties: false,
});
const city = object({ name: { type: 'string' }, country: { type: 'string' }, size: { enum: ['small', 'large'] } });
const weather = object({ city: { type: 'string' }, unit: { enum: ['celsius', 'fahrenheit'] } });
const capital = user('What is the capital of Japan?');

const models = [];
for await (const each of client.models.list()) models.push(each.id);
const whole = await client.chat.completions.create({ ...ask, messages: capital });
const stream = client.chat.completions.stream({
  ...ask, messages: capital, stream_options: { include_usage: true },
});
let streamed = '';
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? '';
const final = await stream.finalChatCompletion();
const parsed = await client.chat.completions.parse({
  ...ask,
  messages: user('Describe Paris as JSON with name, country and size.'),
  response_format: { type: 'json_schema', json_schema: { name: 'City', strict: true, schema: city } },
});
const calling = client.chat.completions.stream({
  ...ask,
  messages: user('What is the weather in Paris?'),
  tools: [{ type: 'function', function: { name: 'GetWeather', strict: true, parameters: weather } }],
  tool_choice: 'required',
  parallel_tool_calls: false,
  stream_options: { include_usage: true },
});
const called = await calling.finalChatCompletion();
const refused = await client.chat.completions
  .create({ ...ask, model: 'nobody', messages: capital })
  .then(() => null, (error) => (error instanceof OpenAI.NotFoundError ? error.code : String(error)));

console.log(JSON.stringify({
  usages: [whole, final, parsed, called].map(({ usage }) => [usage.prompt_tokens, usage.completion_tokens]),
  version: VERSION,
  models,
  text: whole.choices[0].message.content,
  streamed,
  city: parsed.choices[0].message.parsed,
  arguments: JSON.parse(called.choices[0].message.tool_calls[0].function.arguments),
  refused,
}));
