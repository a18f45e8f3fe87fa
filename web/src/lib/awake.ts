/** Whether anybody can see the page, and whether it slept. Knows nothing of what depends on that. */
const LOOK_MS = 2_000;
const JUMP_MS = 8_000; // a clock that went on so far between two looks went on without us

/** Resolves when the page is shown, at once where it is, or when `signal` aborts. */
export function shown(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const look = (): void => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      signal.removeEventListener("abort", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look);
    look();
  });
}

/** Calls when the page has been hidden for so long, until the function that comes back is called. */
export function onHidden(ms: number, call: () => void): () => void {
  let timer = 0;
  const look = (): void => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(call, ms);
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

/**
 * Calls when connections that look alive may be dead: the machine slept, the page was frozen, or the network came back.
 * Until the function that comes back is called.
 */
export function onWake(call: () => void): () => void {
  let looked = Date.now();
  const timer = setInterval(() => {
    const now = Date.now();
    if (now - looked > JUMP_MS) call();
    looked = now;
  }, LOOK_MS);
  const restored = (event: PageTransitionEvent): void => {
    if (event.persisted) call();
  };
  addEventListener("online", call);
  addEventListener("pageshow", restored);
  document.addEventListener("resume", call);
  return () => {
    clearInterval(timer);
    removeEventListener("online", call);
    removeEventListener("pageshow", restored);
    document.removeEventListener("resume", call);
  };
}
