package regions

import (
	"fmt"
	"strconv"
	"strings"
)

// maxPrice is the greatest price in milliseconds.
const maxPrice = 3_600_000

// CheckName returns an error for an invalid name of a region: a name has 1 to 32 of a-z, 0-9 and '-', first a letter or
// digit.
func CheckName(name string) error {
	unknown := func(c rune) bool { return c != '-' && (c < 'a' || c > 'z') && (c < '0' || c > '9') }
	if name == "" || len(name) > 32 || name[0] == '-' || strings.ContainsFunc(name, unknown) {
		return fmt.Errorf("%.40q is not a name of a region: use 1 to 32 of a-z, 0-9 and '-', first a letter or digit", name)
	}
	return nil
}

// ParsePrices reads prices in the form REGION=MS.
func ParsePrices(list []string) (map[string]float64, error) {
	prices := map[string]float64{}
	for _, text := range list {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("%.60q is not REGION=MS", text)
		}
		if err := CheckName(name); err != nil {
			return nil, err
		}
		price, err := strconv.ParseFloat(value, 64)
		if err != nil || !(price >= 0 && price <= maxPrice) {
			return nil, fmt.Errorf("%.60q has no price from 0 to %d milliseconds", text, maxPrice)
		}
		if _, twice := prices[name]; twice {
			return nil, fmt.Errorf("has two prices of region %s", name)
		}
		if len(prices) == maxRegions {
			return nil, fmt.Errorf("has more than %d regions", maxRegions)
		}
		prices[name] = price
	}
	return prices, nil
}
