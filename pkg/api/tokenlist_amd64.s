#include "textflag.h"

DATA ·comma<>+0(SB)/4, $0x2c2c2c2c
GLOBL ·comma<>(SB), RODATA|NOPTR, $4
DATA ·blank<>+0(SB)/4, $0x20202020
GLOBL ·blank<>(SB), RODATA|NOPTR, $4
DATA ·zero<>+0(SB)/4, $0x30303030
GLOBL ·zero<>(SB), RODATA|NOPTR, $4
DATA ·nine<>+0(SB)/4, $0x09090909
GLOBL ·nine<>(SB), RODATA|NOPTR, $4
DATA ·longest<>+0(SB)/4, $9
GLOBL ·longest<>(SB), RODATA|NOPTR, $4
DATA ·shift<>+0(SB)/4, $72
GLOBL ·shift<>(SB), RODATA|NOPTR, $4
DATA ·tens<>+0(SB)/4, $0x010a010a
GLOBL ·tens<>(SB), RODATA|NOPTR, $4
DATA ·hundreds<>+0(SB)/4, $0x00010064
GLOBL ·hundreds<>(SB), RODATA|NOPTR, $4
DATA ·tenThousands<>+0(SB)/4, $0x00012710
GLOBL ·tenThousands<>(SB), RODATA|NOPTR, $4

// BITS makes of two vectors of bytes that are all ones or zeros one bit for each byte.
#define BITS(low, high, to, scratch) \
	VPMOVMSKB low, to \
	VPMOVMSKB high, scratch \
	SHLQ $32, scratch \
	ORQ scratch, to

// NEXT writes the place of the lowest bit of AX and clears it. Of no bit it writes something.
#define NEXT(offset) \
	TZCNTQ AX, BX \
	ADDL R8, BX \
	MOVL BX, offset(DI) \
	BLSRQ AX, AX

// func listCommas(text *byte, blocks int, at *uint32) (n int)
TEXT ·listCommas(SB), NOSPLIT, $0-32
	MOVQ text+0(FP), SI
	MOVQ blocks+8(FP), CX
	MOVQ at+16(FP), DI
	VPBROADCASTD ·comma<>(SB), Y15
	VPBROADCASTD ·blank<>(SB), Y14
	VPBROADCASTD ·zero<>(SB), Y13
	VPBROADCASTD ·nine<>(SB), Y12
	XORQ R8, R8   // where the block begins
	MOVQ $1, R9   // an element begins with the next byte, or a blank before it
	XORQ R10, R10 // the last byte was a blank
	XORQ R11, R11 // the last byte was 0, the first of an element
	MOVQ DI, R15

block:
	TESTQ CX, CX
	JEQ  done
	VMOVDQU (SI)(R8*1), Y0
	VMOVDQU 32(SI)(R8*1), Y1
	VPCMPEQB Y15, Y0, Y2
	VPCMPEQB Y15, Y1, Y3
	BITS(Y2, Y3, AX, BX) // AX: commas
	VPCMPEQB Y14, Y0, Y2
	VPCMPEQB Y14, Y1, Y3
	BITS(Y2, Y3, DX, BX) // DX: blanks
	VPCMPEQB Y13, Y0, Y2
	VPCMPEQB Y13, Y1, Y3
	BITS(Y2, Y3, R13, BX) // R13: 0
	VPSUBB Y13, Y0, Y0
	VPSUBB Y13, Y1, Y1
	VPMINUB Y12, Y0, Y2
	VPMINUB Y12, Y1, Y3
	VPCMPEQB Y0, Y2, Y2
	VPCMPEQB Y1, Y3, Y3
	BITS(Y2, Y3, R12, BX) // R12: digits

	MOVQ AX, BX
	ORQ  DX, BX
	ORQ  R12, BX
	NOTQ BX // BX: what may not be there. First whatever is neither of these

	LEAQ (R9)(AX*2), R9 // R9: after commas
	MOVQ R9, R14
	NOTQ R14
	ANDQ DX, R14
	ORQ  R14, BX // a blank elsewhere than there

	MOVQ DX, R14
	NOTQ R14
	ANDQ R14, R9
	LEAQ (R10)(DX*2), R10
	ORQ  R10, R9 // R9: where elements begin
	MOVQ R12, R14
	NOTQ R14
	ANDQ R9, R14
	ORQ  R14, BX // one that begins without a digit

	ANDQ R9, R13 // R13: elements that begin with 0
	LEAQ (R11)(R13*2), R11
	ANDQ R12, R11
	ORQ  R11, BX // a digit after such a 0
	JNE  done

	MOVQ AX, R9
	SHRQ $63, R9
	MOVQ DX, R10
	SHRQ $63, R10
	MOVQ R13, R11
	SHRQ $63, R11

	POPCNTQ AX, R12

eight:
	NEXT(0)
	NEXT(4)
	NEXT(8)
	NEXT(12)
	NEXT(16)
	NEXT(20)
	NEXT(24)
	NEXT(28)
	ADDQ $32, DI
	TESTQ AX, AX
	JNE  eight

	LEAQ (R15)(R12*4), DI
	MOVQ DI, R15
	ADDQ $64, R8
	DECQ CX
	JMP  block

done:
	VZEROUPPER
	MOVQ R15, AX
	SUBQ at+16(FP), AX
	SHRQ $2, AX
	MOVQ AX, n+24(FP)
	RET

// func listNumbers(text *byte, at *uint32, groups int, to *uint32) (done int)
TEXT ·listNumbers(SB), NOSPLIT, $0-40
	MOVQ text+0(FP), SI
	MOVQ at+8(FP), DI
	MOVQ groups+16(FP), CX
	MOVQ to+24(FP), DX
	INCQ SI // an element begins after the comma before it
	VPBROADCASTD ·zero<>(SB), Y15
	VPBROADCASTD ·longest<>(SB), Y14
	VPBROADCASTD ·shift<>(SB), Y13
	VPBROADCASTD ·tens<>(SB), Y12
	VPBROADCASTD ·hundreds<>(SB), Y11
	VPBROADCASTD ·tenThousands<>(SB), Y10
	VPXOR Y9, Y9, Y9
	XORQ R15, R15

group:
	CMPQ R15, CX
	JGE  converted
	VMOVDQU (DI), Y0
	VPSUBD -4(DI), Y0, Y0 // one more than the lengths
	VPCMPGTD Y14, Y0, Y1
	VPTEST Y1, Y1
	JNE  converted // one of more than eight bytes
	VPSLLD $3, Y0, Y0
	VPSUBD Y0, Y13, Y0 // by how many bits they are shifted to the end of eight bytes
	VPUNPCKLDQ Y9, Y0, Y1 // of elements 0, 1, 4, 5
	VPUNPCKHDQ Y9, Y0, Y2 // of elements 2, 3, 6, 7
	MOVLQSX -4(DI), AX
	MOVLQSX (DI), BX
	MOVLQSX 4(DI), R8
	MOVLQSX 8(DI), R9
	MOVLQSX 12(DI), R10
	MOVLQSX 16(DI), R11
	MOVLQSX 20(DI), R12
	MOVLQSX 24(DI), R13
	VMOVQ (SI)(AX*1), X3
	VMOVQ (SI)(R8*1), X4
	VMOVQ (SI)(R10*1), X5
	VMOVQ (SI)(R12*1), X6
	VMOVHPS (SI)(BX*1), X3, X3
	VMOVHPS (SI)(R9*1), X4, X4
	VMOVHPS (SI)(R11*1), X5, X5
	VMOVHPS (SI)(R13*1), X6, X6
	VINSERTI128 $1, X5, Y3, Y3
	VINSERTI128 $1, X6, Y4, Y4
	VPSUBUSB Y15, Y3, Y3 // a blank and a comma become 0
	VPSUBUSB Y15, Y4, Y4
	VPSLLVQ Y1, Y3, Y3
	VPSLLVQ Y2, Y4, Y4
	VPMADDUBSW Y12, Y3, Y3 // pairs of digits
	VPMADDUBSW Y12, Y4, Y4
	VPMADDWD Y11, Y3, Y3 // fours
	VPMADDWD Y11, Y4, Y4
	VPACKUSDW Y4, Y3, Y3
	VPMADDWD Y10, Y3, Y3 // all eight
	VMOVDQU Y3, (DX)
	ADDQ $32, DI
	ADDQ $32, DX
	INCQ R15
	JMP  group

converted:
	VZEROUPPER
	MOVQ R15, done+32(FP)
	RET
