package cli

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/base/natsurl"
)

// Flags are a table of flags. A row has the variable, the name, the default, the help text and the checks of a flag.
// The environment variable of a flag follows from the name.
type Flags []Flag

// Flag is a row of Flags. Var makes it.
type Flag struct {
	name  string
	add   func(*pflag.FlagSet)
	check func(*Complaints)
	given func() bool // the value is not the default
}

// Check checks the value of a flag.
type Check[T any] func(name string, value T) error

// Var returns the row of a flag with the given variable, name, default, help text and checks.
func Var[T any](to *T, name string, def T, help string, checks ...Check[T]) Flag {
	return Flag{
		name:  name,
		given: func() bool { return !reflect.DeepEqual(*to, def) },
		add:   func(f *pflag.FlagSet) { add(f, any(to), name, any(def), help) },
		check: func(wrong *Complaints) {
			for _, check := range checks {
				if err := check(name, *to); err != nil {
					*wrong = append(*wrong, err)
				}
			}
		},
	}
}

// Each returns the row of a flag that may be given several times, with one value each. A value may contain commas.
func Each(to *[]string, name, help string) Flag {
	return Flag{
		name:  name,
		given: func() bool { return len(*to) > 0 },
		add:   func(f *pflag.FlagSet) { f.StringArrayVar(to, name, nil, help) },
		check: func(*Complaints) {},
	}
}

// With makes a flag depend on a setting: ok reports whether the flag has an effect. Without effect, a value other than
// the default is an error. remedy is what to give, such as "--record".
func (f Flag) With(remedy string, ok func() bool) Flag {
	before := f.check
	f.check = func(wrong *Complaints) {
		before(wrong)
		wrong.When(f.given() && !ok(), "--%s has no effect without %s: give %s, or omit --%s", f.name, remedy, remedy, f.name)
	}
	return f
}

func add(f *pflag.FlagSet, to any, name string, def any, help string) {
	switch to := to.(type) {
	case *string:
		f.StringVar(to, name, def.(string), help)
	case *bool:
		f.BoolVar(to, name, def.(bool), help)
	case *int:
		f.IntVar(to, name, def.(int), help)
	case *int64:
		f.Int64Var(to, name, def.(int64), help)
	case *uint32:
		f.Uint32Var(to, name, def.(uint32), help)
	case *uint64:
		f.Uint64Var(to, name, def.(uint64), help)
	case *float64:
		f.Float64Var(to, name, def.(float64), help)
	case *time.Duration:
		f.DurationVar(to, name, def.(time.Duration), help)
	case *[]string:
		f.StringSliceVar(to, name, def.([]string), help)
	default:
		panic(fmt.Sprintf("flag --%s has the type %T", name, to))
	}
}

// Add adds the flags to a set.
func (t Flags) Add(f *pflag.FlagSet) {
	for _, row := range t {
		row.add(f)
	}
}

// Check adds the errors of all flags to wrong.
func (t Flags) Check(wrong *Complaints) {
	for _, row := range t {
		row.check(wrong)
	}
}

// Command returns a command with a table of flags. check adds the errors of several flags together; nil: there are
// none. do runs after all checks.
func Command(cmd *cobra.Command, flags Flags, check func(*Complaints),
	do func(ctx context.Context, args []string) error) *cobra.Command {
	flags.Add(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var wrong Complaints
		flags.Check(&wrong)
		if check != nil {
			check(&wrong)
		}
		if err := wrong.Usage(); err != nil {
			return err
		}
		return do(cmd.Context(), args)
	}
	return cmd
}

// Is returns a check of ok. The error has the name of the flag, the value and a text.
func Is[T any](ok func(T) bool, text string, args ...any) Check[T] {
	return func(name string, value T) error {
		if ok(value) {
			return nil
		}
		verb := "%v"
		if _, is := any(value).(string); is {
			verb = "%q"
		}
		return fmt.Errorf("--%s "+verb+" %s", name, value, fmt.Sprintf(text, args...))
	}
}

// Required returns a check for a value other than the zero value. text is the error after the name of the flag, such as
// "is missing".
func Required[T comparable](text string) Check[T] {
	return func(name string, value T) error {
		var none T
		if value != none {
			return nil
		}
		return fmt.Errorf("--%s %s", name, text)
	}
}

// Valid returns a check of f. The error has the name of the flag and the error of f.
func Valid[T any](f func(T) error) Check[T] {
	return func(name string, value T) error {
		if err := f(value); err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
		return nil
	}
}

type number interface {
	~int | ~int64 | ~uint32 | ~uint64 | ~float64
}

// AtLeast returns a check of a minimum. shown is the minimum in the error; empty: the number.
func AtLeast[T number](least T, shown string) Check[T] {
	if shown == "" {
		shown = fmt.Sprint(least)
	}
	return Is(func(v T) bool { return v >= least }, "is less than %s", shown)
}

// Between returns a check of a range.
func Between[T number](least, most T) Check[T] {
	return Is(func(v T) bool { return least <= v && v <= most }, "is not from %v to %v", least, most)
}

// Positive returns a check for a number above zero.
func Positive[T number]() Check[T] { return Is(func(v T) bool { return v > 0 }, "is not positive") }

// NotNegative returns a check for a number from zero on.
func NotNegative[T number]() Check[T] { return Is(func(v T) bool { return v >= 0 }, "is negative") }

// OneOf returns a check for a list of values. text describes the values in the error.
func OneOf[T comparable](text string, values ...T) Check[T] {
	return Is(func(v T) bool { return slices.Contains(values, v) }, "%s", text)
}

// HTTPAddress is a check of a URL of HTTP.
func HTTPAddress(name, value string) error {
	if err := CheckHTTP(value); err != nil {
		return fmt.Errorf("--%s %w", name, err)
	}
	return nil
}

// CheckHTTP returns an error for a text that is not a URL of HTTP. The error has no password.
func CheckHTTP(url string) error {
	if !strings.HasPrefix(url, "http://") && !strings.HasPrefix(url, "https://") {
		return fmt.Errorf("%q is not an http:// or https:// URL", natsurl.Shown(url))
	}
	return nil
}

// Given reports whether a flag has another value than its default.
func Given(f *pflag.FlagSet, name string) bool {
	flag := f.Lookup(name)
	return flag.Value.String() != flag.DefValue
}
