/** Places in a prompt that are to be filled in: `{{name}}`. */
const PLACE = /\{\{[^{}\n]*\}\}/g;

/** The first place at or after `from`, as characters; null where there is none. */
export function nextPlace(text: string, from: number): readonly [number, number] | null {
  PLACE.lastIndex = from;
  const found = PLACE.exec(text);
  return found === null ? null : [found.index, found.index + found[0].length];
}

/** What is looked for among the prompts: the name that a message begins with, or null where it is no name. */
export const soughtIn = (draft: string): string | null => /^\/(\S*)$/.exec(draft)?.[1] ?? null;

/** The prompts whose names have what was typed, those that begin with it first. */
export function matching<P extends { readonly name: string }>(prompts: readonly P[], typed: string): P[] {
  const sought = typed.toLocaleLowerCase();
  const at = ({ name }: P): number => name.toLocaleLowerCase().indexOf(sought);
  return prompts.filter((prompt) => at(prompt) >= 0).sort((one, other) => Math.sign(at(one)) - Math.sign(at(other)));
}
