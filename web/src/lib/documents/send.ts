/**
 * Sends one file to be read. By XMLHttpRequest: `fetch` cannot tell how much of a body has gone. Knows nothing of what
 * becomes of the file.
 */
import { ApiError, signedIn } from "../api";
import type { Job, MessageFile } from "./api";

type Sent = (bytes: number) => void;

/**
 * The job that reads the file. `sent` hears of the bytes that went. An abort ends it, as long as bytes are still to go;
 * then it rejects with an AbortError, otherwise with an ApiError.
 */
export async function send(file: File, shelf: number, sent: Sent, signal: AbortSignal): Promise<Job> {
  const { job } = await sendTo<{ job: Job }>("/api/documents", { collection: `${shelf}` }, file, sent, signal);
  return job;
}

/** A file for a question, which is being read. Rejects as `send` does. */
export const attach = (file: File, sent: Sent, signal: AbortSignal): Promise<MessageFile> =>
  sendTo("/api/files", {}, file, sent, signal);

type Fields = Readonly<Record<string, string>>;

async function sendTo<T>(address: string, fields: Fields, file: File, sent: Sent, signal: AbortSignal): Promise<T> {
  try {
    return await sendOnce(address, fields, file, sent, signal);
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 401 && (await signedIn(signal)))) throw error;
    return sendTo(address, fields, file, sent, signal);
  }
}

function sendOnce<T>(address: string, fields: Fields, file: File, sent: Sent, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const form = new FormData();
    for (const [name, value] of Object.entries(fields)) form.append(name, value);
    form.append("wait", "0");
    form.append("file", file);
    const request = new XMLHttpRequest();
    const abort = (): void => request.abort();
    request.open("POST", address);
    request.responseType = "json";
    request.upload.onprogress = ({ loaded, total }) => sent(total > 0 ? (file.size * loaded) / total : 0);
    request.upload.onload = () => {
      signal.removeEventListener("abort", abort); // it has arrived: from here on the server has it
      sent(file.size);
    };
    request.onabort = () => reject(new DOMException("", "AbortError"));
    request.onerror = () => reject(new ApiError(0, "unreachable", ""));
    request.onload = () => {
      const answer = request.response as { error?: { code?: string; message?: string } } | null;
      if (request.status < 300 && answer !== null) resolve(answer as T);
      else reject(new ApiError(request.status, answer?.error?.code ?? "", answer?.error?.message ?? ""));
    };
    if (signal.aborted) return reject(new DOMException("", "AbortError"));
    signal.addEventListener("abort", abort, { once: true });
    request.send(form);
  });
}
