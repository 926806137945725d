// Package tenants attributes requests to tenants with a bounded number of names, and limits their tokens.
//
//	names, err := tenants.NewNames(sources, hashed, secret)
//	ctx = names.With(ctx, header)              // at the edge: headers and API keys
//	name := names.Of(ctx, salt, adapter)       // "": no tenant
//	slot := table.Find(name, tokens, now)      // counts of a tenant belong to its slot
//	verdict := quotas.Admit(name, tokens, now) // before the choice
//
// [Names] makes names from the sources: salt, adapter, api-key, or a header. An API key never appears in a name.
//
// [Table] bounds the names by weighted space-saving (Metwally et al., ICDT 2005): a new name replaces the name with the
// least weight. The counts of a replaced name count for [Other], so sums stay exact. Each slot has a bound of its
// tenant's tokens under Other. A tenant with more than the average of all slots always has a slot.
//
// [Quotas] is a token bucket for each tenant. Nodes exchange the used tokens. It is a state machine with the time as an
// argument.
//
// A Names is safe for concurrent use. Only one goroutine at a time may use a Table or a Quotas.
package tenants
