package rpc

import "sync/atomic"

// What a [Budget] allows.
const (
	HedgeRatio = 10  // one hedged request for so many others
	HedgeBurst = 100 // so many at once after a time without
)

// Budget bounds hedged requests: those that are sent while another that asks the same may still be answered. The zero
// value is full. Any number of goroutines may use it.
type Budget struct{ debt atomic.Int64 } // hedged requests, times HedgeRatio, that other requests have not paid for

// Earn tells that a request was sent that is no hedge.
func (b *Budget) Earn() {
	for {
		debt := b.debt.Load()
		if debt == 0 || b.debt.CompareAndSwap(debt, debt-1) {
			return
		}
	}
}

// Spend takes a hedged request from the budget. It reports false if there is none.
func (b *Budget) Spend() bool {
	for {
		debt := b.debt.Load()
		if debt+HedgeRatio > HedgeBurst*HedgeRatio {
			return false
		}
		if b.debt.CompareAndSwap(debt, debt+HedgeRatio) {
			return true
		}
	}
}
