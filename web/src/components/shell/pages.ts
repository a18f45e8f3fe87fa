/** The parts of the page beside the conversation, each loaded when it is gone to. Their names are those of addresses. */
import type { Component } from "svelte";
import type { ServerInfo } from "../../lib/api";
import type { Asking } from "../../lib/asking/asking.svelte";

export interface PageProps {
  rest: readonly string[]; // what follows the page's name in the address
  server: ServerInfo | null;
  asking: Asking;
  go: (path: string) => void; // to another address of the page
  addFiles: () => void; // have some chosen
}

type Loader = () => Promise<{ default: Component<PageProps> }>;

export const PAGES: Readonly<Record<string, Loader>> = {
  documents: () => import("../documents/DocumentsPage.svelte"),
  presets: () => import("../presets/PresetsPage.svelte"),
  memory: () => import("../memory/MemoryPage.svelte"),
  diffusion: () => import("../diffusion/DiffusionPage.svelte"),
  shared: () => import("../share/SharedPage.svelte"),
  operator: () => import("../operator/OperatorPage.svelte"),
};
