/** How words are drawn: what may be set, by the names that the server has for it, and within which bounds. */
import { numberField, type NumberField } from "./options";

const named = <N extends string>(
  name: N,
  whole: boolean,
  least: number | null,
  most: number | null,
  bounds: Partial<NumberField> = {},
): NumberField & { readonly name: N } => ({ ...numberField(name, whole, least, most), ...bounds, name });

export const SAMPLING = [
  named("temperature", false, 0, 2),
  named("top_p", false, null, 1, { above: 0 }),
  named("top_k", true, 0, null),
  named("min_p", false, 0, null, { below: 1 }),
  named("repetition_penalty", false, null, 100, { above: 0 }),
  named("presence_penalty", false, -2, 2),
  named("frequency_penalty", false, -2, 2),
  named("seed", true, null, null),
] as const;

export type SamplingName = (typeof SAMPLING)[number]["name"];
export type Sampling = Readonly<Partial<Record<SamplingName, number>>>;
