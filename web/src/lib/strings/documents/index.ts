import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en } from "./en";

/** What is said of documents: loaded with them. */
export const said = stringsOf({ en, de });
