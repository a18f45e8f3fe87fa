/** Why an answer failed, in words: what ended with its server is told as such, all else as the server says it. */
import type { Answer } from "./answer";
import { strings } from "./strings";

export function whyFailed({ failure, text, parts }: Answer): string {
  const ending = strings.endings[failure?.code as keyof typeof strings.endings];
  if (ending === undefined) return failure?.message || strings.failed;
  return text === "" && parts.length === 0 ? ending : `${ending} ${strings.kept}`;
}
