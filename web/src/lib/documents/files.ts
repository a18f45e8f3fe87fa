/** The files of a drop or a paste. Folders, which a browser shows as files of nothing, are told from them. */
import type { Candidate } from "./refuse";

export interface Given extends Candidate {
  readonly file: File;
}

export const asGiven = (file: File): Given => ({ name: file.name, size: file.size, type: file.type, file });

export function given(transfer: DataTransfer): Given[] {
  const items = [...transfer.items].filter(({ kind }) => kind === "file");
  return items.flatMap((item) => {
    const file = item.getAsFile();
    if (file === null) return [];
    return [{ ...asGiven(file), folder: item.webkitGetAsEntry()?.isDirectory ?? false }];
  });
}

/** Are there files in what is dragged over the page? */
export const brings = (transfer: DataTransfer | null): transfer is DataTransfer =>
  transfer?.types.includes("Files") ?? false;
