// Package index applies the log to the index and answers queries from it.
//
//   - node restores, follows, answers from and saves the partitions of one node
//   - scatter sends a query to the nodes that hold its partitions, with hedges, and merges the answers
//   - sole counts the blocks with only one holder
package index
