/**
 * Where one looks at a drawing: it is scaled, each way by its own factor, then moved. So a tree of many leaves fits a
 * box that is wider than high. Pure; sizes and places are in CSS pixels.
 */
export interface View {
  readonly sx: number;
  readonly sy: number;
  readonly x: number;
  readonly y: number;
}

export interface Size {
  readonly width: number;
  readonly height: number;
}

const LARGEST = 1.6;

/** All of a drawing in a box, no larger than it is, with `margin` around it. */
export function fit(drawing: Size, box: Size, margin: number): View {
  const along = (length: number, room: number): { scale: number; at: number } => {
    const left = Math.max(1, room - 2 * margin);
    const scale = Math.min(1, left / Math.max(1, length));
    return { scale, at: margin + (left - length * scale) / 2 };
  };
  const [across, down] = [along(drawing.width, box.width), along(drawing.height, box.height)];
  return { sx: across.scale, sy: down.scale, x: across.at, y: down.at };
}

/**
 * `factor` times as large, with the point (x, y) of the box staying where it is. The smaller scale grows first, until
 * both are the same; neither gets smaller than in `whole`, where all of the drawing fits.
 */
export function zoom(view: View, factor: number, x: number, y: number, whole: View): View {
  let { sx, sy } = view;
  if (factor > 1) {
    const least = Math.min(LARGEST, Math.min(sx, sy) * factor);
    [sx, sy] = [Math.max(sx, least), Math.max(sy, least)];
  } else {
    [sx, sy] = [Math.max(whole.sx, sx * factor), Math.max(whole.sy, sy * factor)];
  }
  return { sx, sy, x: x - ((x - view.x) * sx) / view.sx, y: y - ((y - view.y) * sy) / view.sy };
}

export const pan = (view: View, dx: number, dy: number): View => ({ ...view, x: view.x + dx, y: view.y + dy });

/** Moved no further than needed to have the drawing's point (x, y) in the box, `margin` from its edges. */
export function reveal(view: View, x: number, y: number, box: Size, margin: number): View {
  const missing = (at: number, size: number): number =>
    at < margin ? margin - at : at > size - margin ? size - margin - at : 0;
  return pan(view, missing(view.x + x * view.sx, box.width), missing(view.y + y * view.sy, box.height));
}
