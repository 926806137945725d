package routesim

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// line is an arm in a plot.
type line struct {
	name   string
	points [][3]float64 // x, TTFT p90 in seconds, hit rate
}

// SVG draws TTFT p90 and hit rate over the load, with a line for every arm. With several ratios, the x axis is KV
// memory by working set, and each rate has lines of its own.
func (rep *Report) SVG(w io.Writer) error {
	lines, axis := rep.lines()
	const width, height, left, top, gap = 420.0, 300.0, 60.0, 40.0, 90.0
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f"`, 2*width+left+gap+190,
		height+top+60)
	b.WriteString(" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n")
	fmt.Fprintf(&b, `<text x="%.0f" y="20" font-size="14">%s, %d workers, seed %d</text>`+"\n", left, escape(rep.Workload),
		rep.Workers, rep.Seed)
	x0, x1 := math.Inf(1), math.Inf(-1)
	low, high := math.Inf(1), math.Inf(-1)
	for _, l := range lines {
		for _, p := range l.points {
			x0, x1 = min(x0, p[0]), max(x1, p[0])
			low, high = min(low, max(p[1], 1e-3)), max(high, p[1])
		}
	}
	if !(x1 > x0) {
		x0, x1 = x0-1, x0+1
	}
	low, high = math.Floor(math.Log10(low)), math.Ceil(math.Log10(max(high, low*1.01)))
	if high <= low {
		high = low + 1
	}
	x := func(panel int, v float64) float64 { return left + float64(panel)*(width+gap) + (v-x0)/(x1-x0)*width }
	y := [2]func(v float64) float64{
		func(v float64) float64 {
			return top + height - (math.Log10(max(v, math.Pow(10, low)))-low)/(high-low)*height
		},
		func(v float64) float64 { return top + height - v*height },
	}
	for panel, title := range []string{"TTFT p90, s", "hit rate, share of prompt tokens"} {
		at := x(panel, x0)
		fmt.Fprintf(&b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="none" stroke="#888"/>`+"\n", at, top, width,
			height)
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f">%s</text>`+"\n", at, top-6, title)
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`+"\n", at+width/2, top+height+36, axis)
		for i := range 5 {
			v := x0 + (x1-x0)*float64(i)/4
			fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="middle">%.3g</text>`+"\n", x(panel, v), top+height+18, v)
		}
		var ticks []float64
		if panel == 0 {
			for e := low; e <= high; e++ {
				ticks = append(ticks, math.Pow(10, e))
			}
		} else {
			ticks = []float64{0, 0.25, 0.5, 0.75, 1}
		}
		for _, v := range ticks {
			fmt.Fprintf(&b, `<path d="M%.1f %.1fh%.1f" stroke="#ddd"/><text x="%.1f" y="%.1f" text-anchor="end">%g</text>`+"\n",
				at, y[panel](v), width, at-5, y[panel](v)+4, v)
		}
	}
	for i, l := range lines {
		color := fmt.Sprintf("hsl(%d,70%%,42%%)", i*360/len(lines))
		for panel := range 2 {
			var path []string
			for _, p := range l.points {
				path = append(path, fmt.Sprintf("%.1f,%.1f", x(panel, p[0]), y[panel](p[1+panel])))
			}
			fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.6"/>`+"\n", strings.Join(path, " "),
				color)
			for _, p := range path {
				cx, cy, _ := strings.Cut(p, ",")
				fmt.Fprintf(&b, `<circle cx="%s" cy="%s" r="2.2" fill="%s"/>`, cx, cy, color)
			}
			b.WriteByte('\n')
		}
		ly := top + 14 + 18*float64(i)
		fmt.Fprintf(&b, `<path d="M%.1f %.1fh20" stroke="%s" stroke-width="3"/><text x="%.1f" y="%.1f">%s</text>`+"\n",
			left+2*width+gap+12, ly, color, left+2*width+gap+38, ly+4, escape(l.name))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// lines returns the lines of the plot and the label of the x axis.
func (rep *Report) lines() (lines []line, axis string) {
	ratios, rates := map[float64]bool{}, map[float64]bool{}
	for _, p := range rep.Points {
		ratios[p.Ratio], rates[p.Rate] = true, true
	}
	axis = "requests per second"
	if len(ratios) > 1 {
		axis = "KV memory / working set"
	}
	for _, p := range rep.Points {
		for _, r := range p.Runs {
			name := string(r.Arm)
			if r.Arm.Scales() {
				name = fmt.Sprintf("%s/%d", r.Arm, r.Routers)
			}
			if len(ratios) > 1 && len(rates) > 1 {
				name += fmt.Sprintf(", %g/s", p.Rate)
			}
			i := slices.IndexFunc(lines, func(l line) bool { return l.name == name })
			if i < 0 {
				i, lines = len(lines), append(lines, line{name: name})
			}
			if len(ratios) > 1 {
				lines[i].points = append(lines[i].points, [3]float64{p.Ratio, r.Total.TTFTP90, r.Total.HitRate})
				continue
			}
			for _, s := range r.Stages {
				if !s.Warm {
					lines[i].points = append(lines[i].points, [3]float64{s.Rate, s.TTFTP90, s.HitRate})
				}
			}
		}
	}
	for _, l := range lines {
		slices.SortStableFunc(l.points, func(a, b [3]float64) int {
			switch {
			case a[0] < b[0]:
				return -1
			case a[0] > b[0]:
				return 1
			}
			return 0
		})
	}
	return lines, axis
}

func escape(text string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(text)
}
