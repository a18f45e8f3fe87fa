/** What is said where one signs in, in English. */
export const en = {
  signIn: "Sign in",
  about: "This server asks for an API key. Whoever runs it makes one with",
  again: "Your session has ended. Sign in, and go on where you were.",
  apiKey: "API key",
  showKey: "Show the key",
  refused: "This key is not accepted. It may be mistyped, have expired or been revoked.",
  missing: "Paste a key first.",
  tooOften: (s: number) => `There were too many wrong keys. Try again in ${s} s.`,
  noCookie: "The key is good, but the browser keeps no cookie for this page. Allow it, and try again.",
};

export type SessionStrings = typeof en;
