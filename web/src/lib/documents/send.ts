/**
 * Sends one file to be read. By XMLHttpRequest: `fetch` cannot tell how much of a body has gone. Knows nothing of what
 * becomes of the file.
 */
import { ApiError, signedIn } from "../api";
import type { Job } from "./api";

type Sent = (bytes: number) => void;

/**
 * The job that reads the file. `sent` hears of the bytes that went. An abort ends it, as long as bytes are still to go;
 * then it rejects with an AbortError, otherwise with an ApiError.
 */
export async function send(file: File, shelf: number, sent: Sent, signal: AbortSignal): Promise<Job> {
  try {
    return await sendOnce(file, shelf, sent, signal);
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 401 && (await signedIn(signal)))) throw error;
    return send(file, shelf, sent, signal);
  }
}

function sendOnce(file: File, shelf: number, sent: Sent, signal: AbortSignal): Promise<Job> {
  return new Promise((resolve, reject) => {
    const form = new FormData();
    form.append("collection", `${shelf}`);
    form.append("wait", "0");
    form.append("file", file);
    const request = new XMLHttpRequest();
    const abort = (): void => request.abort();
    request.open("POST", "/api/documents");
    request.responseType = "json";
    request.upload.onprogress = ({ loaded, total }) => sent(total > 0 ? (file.size * loaded) / total : 0);
    request.upload.onload = () => {
      signal.removeEventListener("abort", abort); // it has arrived: from here on it is a job, which can be cancelled
      sent(file.size);
    };
    request.onabort = () => reject(new DOMException("", "AbortError"));
    request.onerror = () => reject(new ApiError(0, "unreachable", ""));
    request.onload = () => {
      const answer = request.response as { job?: Job; error?: { code?: string; message?: string } } | null;
      if (request.status < 300 && answer?.job) resolve(answer.job);
      else reject(new ApiError(request.status, answer?.error?.code ?? "", answer?.error?.message ?? ""));
    };
    if (signal.aborted) return reject(new DOMException("", "AbortError"));
    signal.addEventListener("abort", abort, { once: true });
    request.send(form);
  });
}
