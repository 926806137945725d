// Package jinja renders chat templates: the part of Jinja2 that they are written in, with Python's meaning of it.
//
//	t, err := jinja.Parse(text)
//	out, err := t.Render(ctx, jinja.Vars{"messages": messages, "tools": tools, "add_generation_prompt": true})
//
// # Promises
//
//  1. What is rendered is what Jinja2 renders in the environment that Hugging Face's transformers makes (trim_blocks,
//     lstrip_blocks, loop controls, generation blocks, tojson, raise_exception, strftime_now). Judges
//     (integration/judges/tokenize) compare real templates and random conversations with Jinja2 itself. What is not
//     known to be the same is refused, with what it is: by [Parse] if the text shows it (statements, filters, tests,
//     global names), by [Template.Render] if only the values do (printing a list, upper case of letters that are not
//     ASCII).
//  2. A template reads nothing but its variables: there are no loaders. Its work, the bytes that it makes and its
//     depth are bounded. Work is counted by the bytes that are read and written, and the context is checked after each
//     256 KiB of it: a rendering ends within milliseconds after the context is done. [ParseContext] does the same.
//  3. A Template does not change. Any number of goroutines may use it.
//
// # Values
//
//	None, bool      nil, bool
//	int, float      int64, float64; an integer beyond int64 can be printed and compared by nobody ([big])
//	str             string
//	list, tuple, …  *[list]
//	dict            *[Dict], which keeps the order of its keys, as Python's do
//	undefined       [undefined]
//
// [Decode] makes them of JSON, as Python's json.loads does.
//
// # Builtins
//
// Filters, tests, functions and methods are each a builtin, which only run.invoke calls. It counts the size of all
// operands. A builtin that does not read its operands, or only by functions that count, is marked as counted. Texts are
// read by the functions of text.go alone, which count piece by piece; a test finds others.
package jinja
