/**
 * Pictures for a question. A file is drawn and written anew: upright, no larger than a model looks at, and nothing of
 * where or when it was taken is left. Knows nothing of where they are shown.
 */

export interface Picture {
  readonly url: string; // a data: URL
  readonly name: string;
}

export const MOST_PICTURES = 16; // of a question
export const PICTURE_TYPES: readonly string[] = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SIDE = 2048; // pixels
const LOSSLESS = 1_500_000; // characters: a PNG that is longer becomes a JPEG
const QUALITY = 0.9;

let given: readonly File[] = []; // elsewhere, for the next question

/** Has a picture shown with the next question, wherever that is written. */
export function giveNext(file: File): void {
  given = [...given, file];
}

export function takeGiven(): readonly File[] {
  const taken = given;
  given = [];
  return taken;
}

export const isPicture = (file: File): boolean => PICTURE_TYPES.includes(file.type);

/** The size of a picture whose longer side is at most `most` pixels. */
export function fitted(width: number, height: number, most = SIDE): [number, number] {
  const scale = Math.min(1, most / Math.max(width, height));
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
}

/** Throws where the browser cannot read the file. */
export async function pictureOf(file: File): Promise<Picture> {
  const drawn = await createImageBitmap(file, { imageOrientation: "from-image" });
  try {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = fitted(drawn.width, drawn.height);
    const context = canvas.getContext("2d");
    if (context === null) throw new Error("This browser draws no pictures.");
    const photo = file.type === "image/jpeg";
    if (photo) paper(context, canvas);
    context.drawImage(drawn, 0, 0, canvas.width, canvas.height);
    if (photo) return { url: canvas.toDataURL("image/jpeg", QUALITY), name: file.name };
    const url = canvas.toDataURL("image/png");
    if (url.length <= LOSSLESS) return { url, name: file.name };
    paper(context, canvas); // a JPEG has no transparent parts
    context.drawImage(drawn, 0, 0, canvas.width, canvas.height);
    return { url: canvas.toDataURL("image/jpeg", QUALITY), name: file.name };
  } finally {
    drawn.close();
  }
}

function paper(context: CanvasRenderingContext2D, canvas: HTMLCanvasElement): void {
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
}
