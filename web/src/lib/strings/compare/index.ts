/** What is said where answers are compared, in the page's language. It comes with the parts that say it. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en, type CompareStrings } from "./en";

export const told = stringsOf<CompareStrings>({ en, de });
