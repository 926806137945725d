// Package jinja renders chat templates: the part of Jinja2 that chat templates use, with Python's semantics.
//
//	t, err := jinja.Parse(ctx, text)
//	out, err := t.Render(ctx, jinja.Vars{"messages": messages, "tools": tools, "add_generation_prompt": true})
//
// # Promises
//
//  1. The output equals the output of Jinja2 in the environment of Hugging Face's transformers (trim_blocks,
//     lstrip_blocks, loop controls, generation blocks, tojson, raise_exception, strftime_now). Judges
//     (integration/judges/tokenize) compare real templates and random conversations with Jinja2 itself. A feature with
//     a possibly different result is refused by name: by [Parse] if the text shows the feature (statements, filters,
//     tests, global names), by [Template.Render] if only the values show it (printing a list, upper case of non-ASCII
//     letters).
//  2. A template reads only its variables: no loaders exist. Its work, its allocated bytes and its depth are bounded.
//     The unit of work is a byte read or written. The context is checked after every 256 KiB of work, so a rendering
//     ends within milliseconds after the end of the context. [Parse] behaves in the same way.
//  3. A Template is immutable and safe for concurrent use.
//
// # Values
//
//	None, bool      nil, bool
//	int, float      int64, float64; integers beyond int64 support neither printing nor comparing ([big])
//	str             string
//	list, tuple, …  *[list]
//	dict            *[Dict], which keeps the order of its keys, as Python does
//	undefined       [undefined]
//
// [Decode] creates these values from JSON, as Python's json.loads does.
//
// # Builtins
//
// Filters, tests, functions and methods are builtins. Only run.invoke calls a builtin, after counting the size of all
// operands. A builtin is marked as counted if it does not read its operands, or reads them only through functions that
// count. Only the functions of text.go read texts, and count piece by piece; a test finds violations.
package jinja
