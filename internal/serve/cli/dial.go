package cli

import (
	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/base/dial"
)

// DialFlag adds --dial-allow; about is the purpose in its help text. The returned function creates the rule.
func DialFlag(f *pflag.FlagSet, about string) func() (*dial.Rule, error) {
	var allowed []string
	f.StringSliceVar(&allowed, "dial-allow", dial.Default(), about+"; CIDRs, an empty list permits none. Link-local, "+
		"multicast and broadcast addresses and clouds' metadata services are never dialled")
	return func() (*dial.Rule, error) { return dial.NewRule(allowed) }
}
