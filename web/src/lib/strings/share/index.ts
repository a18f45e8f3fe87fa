/** What is said of links to chats, in the page's language. It comes with the page that says it. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en, type ShareStrings } from "./en";

export const shared = stringsOf<ShareStrings>({ en, de });
