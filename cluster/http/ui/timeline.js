// A row for each stage and a block for each micro-batch in it, scrolling to the left.

const INSET = 7; // pixels between a block and its row's edge
const SHORTEST = 1.5; // pixels of a block that took no time
const LEAST = 0.22; // of a mixed block's height that either color has
const EVERY_S = [0.25, 0.5, 1, 2, 5, 10]; // seconds between lines of the grid
const APART = 64; // pixels at least between two of those

/** Reads the colors from the style sheet; they depend on the color scheme. */
export function colors() {
  const style = getComputedStyle(document.documentElement);
  const names = ["prefill", "decode", "idle", "grid", "ink"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** Sizes the canvas as it is shown, in the screen's own pixels. */
export function fitted(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return { context, width, height };
}

/** `view`: the times at both edges. `picked`: the micro-batch whose path is shown. */
export function draw(canvas, batches, numStages, view, picked, color) {
  const { context, width, height } = fitted(canvas);
  const place = {
    x: (time) => ((time - view.begin) / (view.end - view.begin)) * width,
    top: (stage) => (stage * height) / numStages + INSET,
    tall: height / numStages - 2 * INSET,
  };
  context.clearRect(0, 0, width, height);
  context.fillStyle = color.idle;
  for (let stage = 0; stage < numStages; stage++) context.fillRect(0, place.top(stage), width, place.tall);
  drawGrid(context, view, width, height, place, color);
  for (const batch of batches) {
    context.globalAlpha = picked && batch !== picked ? 0.45 : 1;
    for (const run of batch.runs) drawRun(context, batch, run, place, color);
  }
  context.globalAlpha = 1;
  if (picked) drawPath(context, picked, place, color);
}

function drawGrid(context, view, width, height, place, color) {
  const second = width / (view.end - view.begin);
  const every = EVERY_S.find((each) => each * second >= APART) ?? EVERY_S.at(-1);
  context.fillStyle = color.grid;
  for (let at = Math.ceil(view.begin / every) * every; at < view.end; at += every) {
    context.fillRect(Math.round(place.x(at)), 0, 1, height);
  }
}

/** Computing is solid; waiting for experts on other actors is pale. */
function drawRun(context, batch, run, place, color) {
  const left = place.x(run.begin);
  const wide = Math.max(place.x(run.end) - left, SHORTEST);
  const top = place.top(run.stage);
  const share = prefillShare(batch);
  const solid = run.end > run.begin ? Math.min(run.busy / (run.end - run.begin), 1) : 1;
  const alpha = context.globalAlpha;
  const fill = (from, width, strength) => {
    context.globalAlpha = alpha * strength;
    fillRounded(context, color.prefill, [from, top, width, place.tall * share], share < 1 ? [1, 1, 0, 0] : [1]);
    fillRounded(context, color.decode, [from, top + place.tall * share, width, place.tall * (1 - share)], share ? [0, 0, 1, 1] : [1]);
  };
  fill(left, wide * solid, 1);
  if (solid < 0.99) fill(left + wide * solid, wide * (1 - solid), 0.4);
  context.globalAlpha = alpha;
}

/** `corners`: which corners are round, in CSS order. */
function fillRounded(context, color, [left, top, wide, tall], corners) {
  if (tall <= 0) return;
  const gap = wide > 4 ? 1 : 0; // separates blocks that touch
  context.fillStyle = color;
  context.beginPath();
  context.roundRect(left, top, wide - gap, tall, corners.map((is) => is * Math.min(4, wide / 3)));
  context.fill();
}

export function prefillShare({ prefill, decodes }) {
  if (!prefill || !decodes) return prefill ? 1 : 0;
  return Math.min(Math.max(prefill / (prefill + decodes), LEAST), 1 - LEAST);
}

function drawPath(context, batch, place, color) {
  context.strokeStyle = color.ink;
  context.lineWidth = 2;
  for (const run of batch.runs) {
    const left = place.x(run.begin);
    context.strokeRect(left, place.top(run.stage), Math.max(place.x(run.end) - left, SHORTEST), place.tall);
  }
  context.lineWidth = 1.5;
  context.beginPath();
  for (const [index, run] of batch.runs.slice(1).entries()) {
    const before = batch.runs[index];
    context.moveTo(place.x(before.end), place.top(before.stage) + place.tall);
    context.lineTo(place.x(run.begin), place.top(run.stage));
  }
  context.stroke();
}

/** Returns the micro-batch at or near this point of the canvas. */
export function batchAt(canvas, batches, numStages, view, x, y) {
  const stage = Math.floor((y / canvas.clientHeight) * numStages);
  const second = (view.end - view.begin) / canvas.clientWidth;
  const time = view.begin + x * second;
  const off = (run) => Math.max(run.begin - time, time - run.end, 0);
  const near = batches.flatMap((batch) => batch.runs.filter((run) => run.stage === stage).map((run) => [off(run), batch]));
  const [best] = near.sort((a, b) => a[0] - b[0]);
  return best && best[0] < 4 * second ? best[1] : null;
}
