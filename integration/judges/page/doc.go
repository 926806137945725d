// Package page shows the live page of a cluster of three nodes in a real Chromium, and compares the page with the API:
// every view, with only the keyboard, at 400 pixels, dark, and with a token. axe-core finds no serious fault. Build tag
// judges; see `make judges`.
//
// -pictures rewrites the pictures of docs/pictures.
package page
