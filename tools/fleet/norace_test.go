//go:build !race

package fleet

const underRace = false
