package rpc

import "sync/atomic"

// Limits of a [Budget].
const (
	HedgeRatio = 10  // one hedged request for every 10 other requests
	HedgeBurst = 100 // hedged requests at once after a time without hedging
)

// Budget bounds hedged requests. A hedged request repeats a request while a reply to the first may still arrive. The
// zero value is full. A Budget is safe for concurrent use.
type Budget struct{ debt atomic.Int64 } // HedgeRatio times the hedged requests that no other request has earned

// Earn adds a request that is not hedged to the budget.
func (b *Budget) Earn() {
	for {
		debt := b.debt.Load()
		if debt == 0 || b.debt.CompareAndSwap(debt, debt-1) {
			return
		}
	}
}

// Spend removes a hedged request from the budget. Spend returns false if the budget is empty.
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
