/**
 * A strategy's options as fields of a form, made from their JSON schema; what is an object or a list has none. Knows
 * nothing of the page.
 */
export type Value = number | string | boolean;

interface Named {
  readonly name: string;
  readonly about: string;
}

/** `above` and `below` are bounds that are not reached themselves. */
export interface NumberField extends Named {
  readonly kind: "number";
  readonly whole: boolean;
  readonly least: number | null;
  readonly above: number | null;
  readonly most: number | null;
  readonly below: number | null;
  readonly initial: number | null;
}

export interface TextField extends Named {
  readonly kind: "text";
  readonly longest: number | null; // code points
  readonly initial: string | null;
}

export interface ChoiceField extends Named {
  readonly kind: "choice";
  readonly choices: readonly Value[];
  readonly initial: Value | null;
}

export type Field = NumberField | TextField | ChoiceField;

/** As the server writes it; other keywords have no effect on a form. */
export interface Schema {
  readonly type?: string;
  readonly properties?: Readonly<Record<string, Schema>>;
  readonly anyOf?: readonly Schema[];
  readonly $ref?: string;
  readonly $defs?: Readonly<Record<string, Schema>>;
  readonly enum?: readonly unknown[];
  readonly const?: unknown;
  readonly default?: unknown;
  readonly description?: string;
  readonly minimum?: number;
  readonly exclusiveMinimum?: number;
  readonly maximum?: number;
  readonly exclusiveMaximum?: number;
  readonly maxLength?: number;
}

export const numberField = (name: string, whole: boolean, least: number | null, most: number | null): NumberField => ({
  kind: "number", name, about: "", whole, least, above: null, most, below: null, initial: null,
});

/** In the order of the schema, which begins with what matters most. */
export function fieldsOf(options: Schema): Field[] {
  return Object.entries(options.properties ?? {})
    .map(([name, schema]) => fieldOf(name, schema, options))
    .filter((field) => field !== null);
}

function fieldOf(name: string, schema: Schema, root: Schema): Field | null {
  const kinds = (schema.anyOf ?? [schema]).map((each) => resolved(each, root)).filter(({ type }) => type !== "null");
  const [shape] = kinds;
  if (shape === undefined || kinds.length > 1) return null;
  const named = { name, about: schema.description ?? "" };
  const initial = schema.default ?? null;
  const choices = choicesOf(shape);
  if (choices !== null) {
    return choices.every(isValue)
      ? { kind: "choice", ...named, choices, initial: isValue(initial) ? initial : null }
      : null;
  }
  if (shape.type === "string") {
    return {
      kind: "text", ...named, longest: shape.maxLength ?? null, initial: typeof initial === "string" ? initial : null,
    };
  }
  if (shape.type !== "integer" && shape.type !== "number") return null;
  return {
    kind: "number",
    ...named,
    whole: shape.type === "integer",
    least: shape.minimum ?? null,
    above: shape.exclusiveMinimum ?? null,
    most: shape.maximum ?? null,
    below: shape.exclusiveMaximum ?? null,
    initial: typeof initial === "number" ? initial : null,
  };
}

function choicesOf({ enum: several, const: one, type }: Schema): readonly unknown[] | null {
  if (several !== undefined) return several.filter((each) => each !== "checker"); // the page has none to send
  if (one !== undefined) return [one];
  return type === "boolean" ? [true, false] : null;
}

function resolved(schema: Schema, root: Schema): Schema {
  const name = /^#\/\$defs\/(.+)$/.exec(schema.$ref ?? "")?.[1];
  return (name === undefined ? undefined : root.$defs?.[name]) ?? schema;
}

export const isValue = (value: unknown): value is Value =>
  typeof value === "string" || typeof value === "boolean" || (typeof value === "number" && Number.isFinite(value));

/** Whether a field may have a value. */
export function fits(field: Field, value: unknown): value is Value {
  switch (field.kind) {
    case "choice":
      return isValue(value) && field.choices.includes(value);
    case "text":
      return typeof value === "string" && (field.longest === null || [...value].length <= field.longest);
    case "number":
      return (
        typeof value === "number" &&
        Number.isFinite(value) &&
        (!field.whole || Number.isSafeInteger(value)) &&
        value >= (field.least ?? -Infinity) &&
        value > (field.above ?? -Infinity) &&
        value <= (field.most ?? Infinity) &&
        value < (field.below ?? Infinity)
      );
  }
}

/** What was typed, as a value of the field; undefined where it is none. */
export function typed(field: NumberField | TextField, text: string): Value | undefined {
  const value = field.kind === "text" ? text : text.trim() === "" ? NaN : Number(text);
  return fits(field, value) ? value : undefined;
}
