/** What the operator's page says, in the page's language. It comes with that page. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en } from "./en";

export type OperatorStrings = typeof en;
export const words = stringsOf<OperatorStrings>({ en, de });
