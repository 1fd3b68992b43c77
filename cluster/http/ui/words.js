// Numbers and sentences for people.

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

/** Formats a duration: 0.0123 gives "12 ms", 1.234 gives "1.23 s". */
export function seconds(value) {
  if (value >= 1) return `${value >= 10 ? value.toFixed(1) : value.toFixed(2)} s`;
  const ms = value * 1000;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

export function rate(value) {
  return value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

export const percent = (share) => `${Math.round(share * 100)}%`;

/** Makes a sentence: "a stage died" gives "A stage died." */
export function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

export function element(tag, { text, ...rest } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), rest);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}
