import "@fontsource-variable/instrument-sans/wght.css";
import "@fontsource-variable/instrument-sans/wght-italic.css";
import "@fontsource-variable/newsreader/wght.css";
import "@fontsource-variable/newsreader/wght-italic.css";
import "./app.css";
import { mount } from "svelte";
import { idle } from "./lib/idle";
import { prerendered } from "./lib/prerendered";
import { speakChosen } from "./lib/strings/language.svelte";
import App from "./components/shell/App.svelte";
import { answerView } from "./components/chat/answerView.svelte";
import { chatIdOf, placeOf } from "./lib/route";

/** Not awaited where it is called: another language's file imports what this one has, and would wait for it. */
async function begin(target: HTMLElement): Promise<void> {
  if (chatIdOf(placeOf(location.pathname)) !== null) answerView.load(); // its page was sent with what this loads
  await speakChosen(); // nothing is shown in one language and then in another
  await new Promise((resume) => setTimeout(resume)); // reading the program and making the page are two tasks, not one long one
  await prerendered.settled();
  prerendered.remove();
  mount(App, { target });
}

const target = document.getElementById("app");
if (target === null) throw new Error("index.html has no #app");
void begin(target);

// The page opens without a connection, and can be installed; see public/sw.js. A browser may refuse, as in private windows.
if (import.meta.env.PROD && "serviceWorker" in navigator) {
  const register = (): void =>
    void idle().then(() => navigator.serviceWorker.register("/sw.js")).catch(() => undefined); // it fetches what it keeps
  if (document.readyState === "complete") register();
  else addEventListener("load", register, { once: true });
}
