/** Where one looks at a drawing: it is scaled, then moved. Pure; sizes and places are in CSS pixels. */
export interface View {
  readonly scale: number;
  readonly x: number;
  readonly y: number;
}

export interface Size {
  readonly width: number;
  readonly height: number;
}

const SMALLEST = 0.03;
const LARGEST = 2;

/** All of a drawing in a box, no larger than it is, with `margin` around it. */
export function fit(drawing: Size, box: Size, margin: number): View {
  const [width, height] = [Math.max(1, box.width - 2 * margin), Math.max(1, box.height - 2 * margin)];
  const scale = Math.min(1, Math.max(SMALLEST, Math.min(width / drawing.width, height / drawing.height)));
  return {
    scale,
    x: margin + (width - drawing.width * scale) / 2,
    y: margin + (height - drawing.height * scale) / 2,
  };
}

/** `factor` times as large, with the point (x, y) of the box staying where it is. */
export function zoom(view: View, factor: number, x: number, y: number): View {
  const scale = Math.min(LARGEST, Math.max(SMALLEST, view.scale * factor));
  const by = scale / view.scale;
  return { scale, x: x - (x - view.x) * by, y: y - (y - view.y) * by };
}

export const pan = (view: View, dx: number, dy: number): View => ({ ...view, x: view.x + dx, y: view.y + dy });

/** Moved no further than needed to have the drawing's point (x, y) in the box, `margin` from its edges. */
export function reveal(view: View, x: number, y: number, box: Size, margin: number): View {
  const missing = (at: number, size: number): number =>
    at < margin ? margin - at : at > size - margin ? size - margin - at : 0;
  return pan(view, missing(view.x + x * view.scale, box.width), missing(view.y + y * view.scale, box.height));
}
