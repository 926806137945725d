package fields

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"image"
	_ "image/gif" // the formats of images in requests
	_ "image/jpeg"
	_ "image/png"
)

// Approximate sizes, for loads of prompts without tokens.
const (
	bytesPerToken  = 4
	pixelsPerToken = 28 * 28 // of Qwen's models with images; InternVL's have the same density
	usualMedia     = 1000    // tokens of an image or another item of unknown size
	mostMedia      = 16384   // tokens of an image: engines reduce larger images
	leastData      = 1024    // bytes of a text without white space that counts as data in base64
	headerBytes    = 64 << 10
)

// length is an estimated number of tokens. The zero value is that of nothing.
type length struct{ bytes, ids, media uint64 }

func (l *length) tokens() uint64 { return l.bytes/bytesPerToken + l.ids + l.media + 1 }

// add adds the tokens of a JSON value.
func (l *length) add(value []byte) { l.value(value, false) }

// value adds the tokens of a value; media means that it describes an image or another item.
func (l *length) value(value []byte, media bool) {
	switch {
	case len(value) == 0:
	case value[0] == '"':
		l.text(value[1:len(value)-1], media)
	case value[0] == '{':
		eachItem(value, func(name []byte, from, to int) {
			item := mediaField(name)
			if !item && !media {
				l.bytes += uint64(len(name) + 2)
			}
			l.value(value[from:to], item || media)
		})
	case value[0] == '[':
		eachItem(value, func(_ []byte, from, to int) {
			if c := value[from]; c >= '0' && c <= '9' {
				l.ids++
				return
			}
			l.value(value[from:to], media)
		})
	default:
		l.bytes += uint64(len(value))
	}
}

// mediaField reports whether a field of a message's part, as quoted JSON, describes an image or another item.
func mediaField(quoted []byte) bool {
	switch string(quoted) {
	case `"image_url"`, `"video_url"`, `"audio_url"`, `"input_audio"`, `"image_embeds"`, `"source"`, `"file_data"`:
		return true
	}
	return false
}

// text adds the tokens of the content of a string.
func (l *length) text(text []byte, media bool) {
	data := text
	switch {
	case bytes.HasPrefix(text, []byte("data:")):
		_, data, _ = bytes.Cut(text, []byte(","))
	case media && (bytes.HasPrefix(text, []byte("http://")) || bytes.HasPrefix(text, []byte("https://"))):
		l.media += usualMedia
		return
	case len(text) < leastData || !isBase64(text[:leastData]):
		if !media {
			l.bytes += uint64(len(text))
		}
		return
	}
	l.media += pixels(data)
}

// isBase64 reports whether a text has only characters of base64, of upper and lower case.
func isBase64(text []byte) bool {
	upper, lower := false, false
	for _, c := range text {
		switch {
		case c >= 'a' && c <= 'z':
			lower = true
		case c >= 'A' && c <= 'Z':
			upper = true
		case c >= '0' && c <= '9', c == '+', c == '/', c == '=', c == '-', c == '_':
		default:
			return false
		}
	}
	return upper && lower
}

// pixels returns the tokens of an image in base64, by its pixels.
func pixels(data []byte) uint64 {
	data = data[:min(len(data), headerBytes)&^3]
	header := make([]byte, base64.StdEncoding.DecodedLen(len(data)))
	n, _ := base64.StdEncoding.Decode(header, data)
	header = header[:n]
	width, height := webp(header)
	if c, _, err := image.DecodeConfig(bytes.NewReader(header)); err == nil {
		width, height = c.Width, c.Height
	}
	if width <= 0 || height <= 0 {
		return usualMedia
	}
	return min(uint64(width)*uint64(height)/pixelsPerToken+1, mostMedia)
}

// webp returns the size of an image in WebP; zero for other data.
func webp(header []byte) (width, height int) {
	if len(header) < 30 || string(header[:4]) != "RIFF" || string(header[8:12]) != "WEBP" {
		return 0, 0
	}
	switch string(header[12:16]) {
	case "VP8X":
		return 1 + int(header[24]) + int(header[25])<<8 + int(header[26])<<16,
			1 + int(header[27]) + int(header[28])<<8 + int(header[29])<<16
	case "VP8 ":
		return int(binary.LittleEndian.Uint16(header[26:]) & 0x3fff), int(binary.LittleEndian.Uint16(header[28:]) & 0x3fff)
	case "VP8L":
		bits := binary.LittleEndian.Uint32(header[21:])
		return 1 + int(bits&0x3fff), 1 + int(bits>>14&0x3fff)
	}
	return 0, 0
}
