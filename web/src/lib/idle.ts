/** Resolves when nothing else goes on. */
export function idle(): Promise<void> {
  return new Promise((resume) => {
    if ("requestIdleCallback" in globalThis) requestIdleCallback(() => resume());
    else setTimeout(resume, 50); // Safari
  });
}
