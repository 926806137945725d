// Package page has a real Chromium show the live page of a cluster of three nodes, and compares what it shows with what
// the API says: each view, with the keyboard alone, at 400 pixels, dark, and with a token. axe-core finds no serious
// fault. Build tag judges; see `make judges`.
//
// With -pictures the pictures of docs/pictures are written anew.
package page
