// Commands to be copied into a shell. Names come from others: they may not end a word, nor hide a part of it.

// word is a text as one word of a shell.
const word = (text) => "'" + text.replaceAll("'", "'\\''") + "'";

// ascii is a value as JSON in which each character but those of printable ASCII is escaped.
const ascii = (value) => JSON.stringify(value).replace(/[^ -~]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

// curl is the command that posts a value as JSON to a path of this indexer.
export const curl = (origin, path, value) =>
  "curl " + word(origin + path) + " -H 'Content-Type: application/json' -d " + word(ascii(value));
