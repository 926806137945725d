// Commands that the reader copies into a shell. Names are untrusted input: quotes keep a name in a single word, and
// escapes keep every character visible.

// word returns text in quotes, as a single word of a shell.
const word = (text) => "'" + text.replaceAll("'", "'\\''") + "'";

// ascii returns a value as JSON. Characters outside printable ASCII are escaped.
const ascii = (value) => JSON.stringify(value).replace(/[^ -~]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

// curl returns the command that posts a value as JSON to a path of this indexer.
export const curl = (origin, path, value) =>
  "curl " + word(origin + path) + " -H 'Content-Type: application/json' -d " + word(ascii(value));
