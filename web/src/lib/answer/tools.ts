/**
 * The calls of an answer, what became of them, and what they ask of a person. Whatever happens, a call of a run that
 * has ended is not running, and nothing of it waits. Knows nothing of how a call is shown.
 */
import type { StoredStep } from "../api";
import type {
  ApprovalRequested,
  ApprovalResolved,
  NoteKept,
  QuestionAnswered,
  QuestionAsked,
  ToolArtifact,
  ToolCall,
  ToolError,
  ToolOutput,
  ToolProgress,
  ToolResult,
  ToolSource,
} from "../protocol";

/** `gone`: the run ended first. */
export interface Approval {
  readonly id: string;
  readonly reason: string;
  readonly risk: ApprovalRequested["risk"];
  readonly preview: string;
  readonly expiresAt: number;
  readonly decision: ApprovalResolved["decision"] | "gone" | null;
}

/** `answer` is null where nobody answered in time. */
export interface Question {
  readonly id: string;
  readonly text: string;
  readonly choices: readonly string[] | null;
  readonly expiresAt: number;
  readonly state: "waits" | "answered" | "gone";
  readonly answer: string | null;
}

export interface Call {
  readonly id: string;
  readonly name: string;
  readonly agent: string | null; // the sub-agent that calls
  readonly arguments: string; // JSON, as the model wrote it
  readonly state: "running" | "done" | "failed" | "cut"; // cut: its run ended first
  readonly progress: { readonly text: string; readonly done: number | null; readonly total: number | null } | null;
  readonly output: string;
  readonly result: {
    readonly text: string;
    readonly truncated: number;
    readonly untrusted: boolean;
    readonly sources: readonly ToolSource[];
  } | null;
  readonly error: { readonly kind: string; readonly message: string } | null;
  readonly artifacts: readonly ToolArtifact[]; // files that it made
  readonly ms: number | null;
  readonly approval: Approval | null;
  readonly questions: readonly Question[];
}

/** The note that a call has kept, which can be taken back; null for any other call. */
export function noteOf(call: Call): NoteKept | null {
  if (call.name !== "remember" || call.state !== "done") return null;
  const [, number, replaced] = /^Kept as note (\d+)\.(?: It replaces: (.*))?$/s.exec(call.result?.text ?? "") ?? [];
  if (number === undefined) return null;
  try {
    const { text } = JSON.parse(call.arguments) as { text: string };
    return { number: Number(number), text: text.split(/\s+/).filter(Boolean).join(" "), replaced: replaced ?? null };
  } catch {
    return null; // not all of the call is there
  }
}

export type ToolEvent =
  | ToolCall
  | ToolProgress
  | ToolOutput
  | ToolResult
  | ToolError
  | ApprovalRequested
  | ApprovalResolved
  | QuestionAsked
  | QuestionAnswered;

const LONGEST_OUTPUT = 100_000; // characters of a streamed output that are kept, the newest

const begun = (id: string, name: string): Call => ({
  id,
  name,
  agent: null,
  arguments: "",
  state: "running",
  progress: null,
  output: "",
  result: null,
  error: null,
  artifacts: [],
  ms: null,
  approval: null,
  questions: [],
});

export function reduceCalls(calls: readonly Call[], event: ToolEvent): readonly Call[] {
  const at = calls.findIndex((call) => call.id === event.call_id);
  const call = calls[at];
  if (call !== undefined) return calls.with(at, { ...call, ...change(call, event) });
  if (!("name" in event)) return calls;
  const fresh = begun(event.call_id, event.name);
  return [...calls, { ...fresh, ...change(fresh, event) }];
}

function change(call: Call, event: ToolEvent): Partial<Call> {
  switch (event.type) {
    case "tool.call":
      return { name: event.name, arguments: event.arguments, agent: event.agent ?? null }; // logs of old have none
    case "tool.progress":
      return { progress: { text: event.text, done: event.done, total: event.total } };
    case "tool.output":
      return { output: (call.output + event.text).slice(-LONGEST_OUTPUT) };
    case "tool.result": {
      const { text, truncated, untrusted, sources } = event;
      const artifacts = event.artifacts ?? []; // logs of old have none
      return { state: "done", result: { text, truncated, untrusted, sources }, artifacts, ms: event.ms };
    }
    case "tool.error":
      return { state: "failed", error: { kind: event.kind, message: event.message }, ms: event.ms };
    case "approval.requested": {
      const { approval_id: id, reason, risk, preview, expires_at: expiresAt } = event;
      return { approval: { id, reason, risk, preview, expiresAt, decision: null } };
    }
    case "approval.resolved":
      return call.approval === null ? {} : { approval: { ...call.approval, decision: event.decision } };
    case "question.asked": {
      const { question_id: id, text, choices, expires_at: expiresAt } = event;
      return { questions: [...call.questions, { id, text, choices, expiresAt, state: "waits", answer: null }] };
    }
    case "question.answered":
      return {
        questions: call.questions.map((question) =>
          question.id === event.question_id ? { ...question, state: "answered", answer: event.text } : question,
        ),
      };
  }
}

/** The calls of a run that has ended. */
export function ended(calls: readonly Call[]): readonly Call[] {
  return calls.map((call) => ({
    ...call,
    state: call.state === "running" ? "cut" : call.state,
    approval: call.approval?.decision === null ? { ...call.approval, decision: "gone" } : call.approval,
    questions: call.questions.map((question) =>
      question.state === "waits" ? { ...question, state: "gone" } : question,
    ),
  }));
}

/** What a call waits for, if it is a person. */
export function asks(call: Call): boolean {
  return call.approval?.decision === null || call.questions.some((question) => question.state === "waits");
}

/** The calls of a step as the chat keeps them; an id is one step's alone there, so `step` gets into it here. */
export function storedCalls({ calls, results }: StoredStep, step: number): Call[] {
  return calls.map((call) => {
    const result = results.find((each) => each.call_id === call.id);
    return {
      ...begun(`${step}/${call.id}`, call.name),
      arguments: call.arguments,
      state: "done",
      result: result ? { text: result.text, untrusted: result.untrusted, truncated: 0, sources: [] } : null,
    };
  });
}
