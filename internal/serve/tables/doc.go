// Package tables prints the answers of indexers for people, as the commands of indexer show them.
//
//	tables.Workers(os.Stdout, list)
//
// The functions print to a writer and ignore errors of writing. Callers pass a bufio.Writer, and check the result of
// Flush.
// Texts of other programs are escaped. The JSON of the same answers is in package api.
package tables
