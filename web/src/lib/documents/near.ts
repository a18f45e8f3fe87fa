/** Which of many children, told apart by `data-number`, are near the window, so that only those need be filled. */
import type { Attachment } from "svelte/attachments";

export const near =
  (changed: (changes: readonly (readonly [number, boolean])[]) => void, margin = "150%"): Attachment<HTMLElement> =>
  (node) => {
    const observer = new IntersectionObserver(
      (entries) =>
        changed(
          entries.map(({ target, isIntersecting }) => [Number((target as HTMLElement).dataset.number), isIntersecting]),
        ),
      { rootMargin: `${margin} 0px` },
    );
    for (const child of node.children) observer.observe(child);
    return () => observer.disconnect();
  };
