import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, Output, generateText, streamText, tool } from 'ai';
import { z } from 'zod';

const { GW_BASE_URL: baseURL, GW_API_KEY: apiKey, GW_MODEL } = process.env;
const gw = createOpenAICompatible({
  name: 'gw', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const ask = { model: gw(GW_MODEL), temperature: 0, maxOutputTokens: 120, maxRetries: 0 };
const prompt = 'What is the capital of Japan?';
const City = z.object({ name: z.string(), country: z.string(), size: z.enum(['small', 'large']) });
const GetWeather = z.object({ city: z.string(), unit: z.enum(['celsius', 'fahrenheit']) });

const whole = await generateText({ ...ask, prompt });
const stream = streamText({ ...ask, prompt, onError: ({ error }) => { throw error; } });
let streamed = '';
for await (const text of stream.textStream) streamed += text;
const parsed = await generateText({
  ...ask,
  prompt: 'Describe Paris as JSON with name, country and size.',
  output: Output.object({ schema: City }),
});
const called = streamText({
  ...ask,
  prompt: 'What is the weather in Paris?',
  tools: { GetWeather: tool({ description: 'The weather of a city.', inputSchema: GetWeather }) },
  toolChoice: 'required',
});
const [call] = await called.toolCalls;
const refused = await generateText({ ...ask, model: gw('nobody'), prompt }).then(
  () => null,
  (error) => (APICallError.isInstance(error) ? JSON.parse(error.responseBody).error.code : String(error)),
);

const usages = [whole.usage, await stream.usage, parsed.usage, await called.usage];
console.log(JSON.stringify({
  usages: usages.map(({ inputTokens, outputTokens }) => [inputTokens, outputTokens]),
  text: whole.text,
  streamed,
  city: parsed.output,
  arguments: GetWeather.parse(call.input),
  refused,
}));
