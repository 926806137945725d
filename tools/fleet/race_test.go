//go:build race

package fleet

const underRace = true
