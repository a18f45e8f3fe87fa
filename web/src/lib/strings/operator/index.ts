/** What the operator's page says, in the page's language. It comes with that page. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en, type OperatorStrings } from "./en";

export const words = stringsOf<OperatorStrings>({ en, de });
