// Package docs executes every command block of the documentation in order on a clean machine, and compares the output
// with the page. The tests have the build tag judges. They need Linux with user namespaces, curl, jq and openssl. See
// `make judges`.
//
// A block is indented code, or fenced code without a language or with the language sh, if a line begins with a command
// or with "$ ". The lines below a command with "$ " are the expected output. Package variable table lists exceptions:
//
//   - programs that run before the page, and values for "..." and other placeholders;
//   - blocks that cannot run here, with the reason and the test of the command;
//   - the kind of comparison.
//
// A block without an entry is executed, so a new block must run or be listed. An entry without a block is an error.
//
// Each page has separate namespaces for network, processes, mounts and the host name. All pages can therefore use the
// fixed ports of the documentation at the same time, and all processes end with the page. A command that serves until
// its end runs in a terminal: the judge waits until the command is ready, and first stops an earlier command with the
// same ports. A program "vllm" simulates the engine at the same address.
//
// Two kinds of comparison exist. Both ignore the width of columns and empty lines. A line "..." of the page matches any
// lines.
//
//   - the default: durations, times of day and versions may differ. All other words and numbers are equal.
//   - numbers: all numbers, sizes and bars may differ, and the order and number of similar rows. Words and columns are
//     equal.
package docs
