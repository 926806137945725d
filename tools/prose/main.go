// Command prose counts words that make comments, messages and documents hard to read: clauses and pronouns in place of
// a noun, and verbs that describe people in place of the code's action.
//
//	go run ./tools/prose                  a line for each package and document, worst first
//	go run ./tools/prose PATH...          only the files and folders at PATH
//	go run ./tools/prose -lines N PATH... the N worst sentences, with file and line
//	go run ./tools/prose -check           exit with status 1 if a figure is above the limit
//
// Prose reads the comments and the longer string literals of Go, JavaScript, Python, shell, YAML and other source
// files, and the text of Markdown files. A place is a package, the tests of a package, the files of another language in
// a folder, or a document. All figures are per 1,000 words. Places of fewer than 120 words are not judged.
//
// The variable kinds has the limits. A figure is a hint. A sentence is good if a newcomer understands the text at the
// first reading.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
)

func main() {
	root := flag.String("root", ".", "root folder of the repository")
	lines := flag.Int("lines", 0, "print this many of the worst sentences")
	check := flag.Bool("check", false, "compare the figures with the limits")
	flag.Parse()
	if err := run(*root, flag.Args(), *lines, *check); err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(1)
	}
}

func run(root string, paths []string, lines int, check bool) error {
	report, err := Count(root, paths...)
	if err != nil {
		return err
	}
	if check {
		if faults := Check(report); len(faults) > 0 {
			for _, fault := range faults {
				fmt.Println(fault)
			}
			return fmt.Errorf("%d figures are above the limits", len(faults))
		}
		return nil
	}
	if lines > 0 {
		for _, s := range report.Worst(lines) {
			fmt.Printf("%s:%d: %s\n", s.File, s.Line, s.Text)
		}
		return nil
	}
	printTable(os.Stdout, report)
	return nil
}

// printTable writes a row for each judged place, worst first, and the sum.
func printTable(w io.Writer, report *Report) {
	names := report.judged()
	slices.SortStableFunc(names, func(a, b string) int {
		return cmp.Compare(report.Places[b].excess(), report.Places[a].excess())
	})
	fmt.Fprintf(w, "%-50s %7s", "", "words")
	for _, k := range kinds {
		fmt.Fprintf(w, " %8s", k.name)
	}
	fmt.Fprintf(w, " %8s\n", "long")
	total := &Figures{}
	for _, f := range report.Places {
		total.add(f)
	}
	for _, name := range names {
		printRow(w, name, report.Places[name])
	}
	printRow(w, "all", total)
	fmt.Fprintf(w, "%-58s", "limit")
	for _, k := range kinds {
		fmt.Fprintf(w, " %7.1f ", k.limit)
	}
	fmt.Fprintln(w)
}

func printRow(w io.Writer, name string, f *Figures) {
	fmt.Fprintf(w, "%-50s %7d", name, f.Words)
	for i, k := range kinds {
		mark := " "
		if f.Rate(i) > k.limit {
			mark = "!"
		}
		fmt.Fprintf(w, " %7.1f%s", f.Rate(i), mark)
	}
	fmt.Fprintf(w, " %7.1f\n", f.perThousand(f.Long))
}
