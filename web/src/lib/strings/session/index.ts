/** What is said where one signs in, in the page's language. It comes with that. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en, type SessionStrings } from "./en";

export const words = stringsOf<SessionStrings>({ en, de });
