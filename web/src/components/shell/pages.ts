/** The parts of the page beside the conversation, each loaded when it is gone to. Their names are those of addresses. */
import type { Component } from "svelte";
import type { ServerInfo } from "../../lib/api";

export interface PageProps {
  rest: readonly string[]; // what follows the page's name in the address
  server: ServerInfo | null;
  go: (path: string) => void; // to another address of the page
}

type Loader = () => Promise<{ default: Component<PageProps> }>;

export const PAGES: Readonly<Record<string, Loader>> = {};
