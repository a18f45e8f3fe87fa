/** What is said of memory, in the page's language. It comes with the parts that say it. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en, type MemoryStrings } from "./en";

export const told = stringsOf<MemoryStrings>({ en, de });
