/** JSON text with line ends and indents, and nothing else changed: what a person approves is what was written. */
export function indentJson(text: string): string {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let depth = 0;
  const line = (): string => `\n${"  ".repeat(depth)}`;
  return text.replace(/("(?:[^"\\]|\\.)*")|\s+|([[{])\s*([\]}])?|[\]}]|,|:/g, (part, string, opens, closes) => {
    if (string !== undefined) return part;
    if (part.trim() === "") return "";
    if (opens !== undefined) return closes === undefined ? ((depth += 1), opens + line()) : opens + closes;
    if (part === "]" || part === "}") return (depth -= 1), line() + part;
    return part === "," ? part + line() : ": ";
  });
}
